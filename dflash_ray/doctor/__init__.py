"""What to look at before a GPU-day is spent. Every check is a function of what it looks at and returns findings; nothing is changed."""
