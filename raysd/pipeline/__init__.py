"""Stages as data, and the runner that resumes them."""
