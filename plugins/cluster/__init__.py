"""Where servers run: this machine, images, containers of KServe's, cells of Ray Serve."""
