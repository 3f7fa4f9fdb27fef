"""What Ray Serve runs: the HTTP ingress and the model replicas."""
