"""What the target is asked, in three splits."""
