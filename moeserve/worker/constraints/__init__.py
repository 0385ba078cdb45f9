"""Which tokens a request may choose next: grammars, budgets of reasoning, and their masks."""
