"""The operations around latent attention. In C++: `CpuStream.latent_store` and `linear_by_head`."""
