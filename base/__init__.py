"""What every package shares and no one owns: terminal, exit codes, words, plug-ins."""
