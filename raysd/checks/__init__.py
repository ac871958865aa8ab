"""What can be known before a GPU hour is spent, one small module per known failure."""
