"""The draft: model, loss, training loop, acceptance."""
