"""What goes to production: the options of Ray Serve and vLLM as plain data, and what a replica does that needs neither."""
