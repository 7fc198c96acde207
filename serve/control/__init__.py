"""What is served: models and their versions, registered, sized, kept across restarts."""
