"""What is installed, what works here, and what to do about what does not."""
