"""A person's taste in some clicks: candidates, which pairs to ask about, a page, and training."""
