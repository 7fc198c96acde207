"""TorchServe's handlers: the base classes of authors' own, and those that archives name."""
