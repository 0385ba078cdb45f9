"""The architecture glm5-next: GLM-5.3-Flash."""
