WHOSE = "the archive"
