"""The engines, one per device, which compute a step's rows. `engine.py` is their interface, the only thing that the
runner depends on."""
