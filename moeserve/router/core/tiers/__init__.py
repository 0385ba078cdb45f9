"""The tiers behind the KV pool, RAM and disk: what they hold, what is loaded and written."""
