"""The operations around latent attention (MLA). In C++: `CpuStream.latent_store` and `linear_by_head`."""
