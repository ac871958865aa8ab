"""The load generator: a streaming client that measures what it receives."""
