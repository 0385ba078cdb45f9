"""For every kernel test: torch on one thread, as in the worker, so that its threads and the pool's do not compete."""

import torch

torch.set_num_threads(1)
