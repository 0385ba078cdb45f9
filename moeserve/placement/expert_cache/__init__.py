"""Which experts in RAM have a copy in GPU memory: the policy, routing traces to judge it by, their replay. No torch.

`docs/explanation/expert-cache.md` says why they are as they are.
"""
