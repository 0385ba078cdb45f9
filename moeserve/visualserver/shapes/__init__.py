"""What `mmproj` files say of their towers, one module for each projector. No torch."""
