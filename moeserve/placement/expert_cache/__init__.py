"""The expert cache: the policy that chooses which RAM experts have a copy in GPU memory, and routing traces with
which the policy is evaluated. No torch.

`docs/explanation/expert-cache.md` gives the reasons.
"""
