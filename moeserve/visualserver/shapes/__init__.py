"""The shapes of vision towers as `mmproj` files describe them, one module for each projector. Nothing here imports
torch."""
