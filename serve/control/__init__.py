"""What may be asked for: models and their versions, registered, sized, kept across restarts."""
