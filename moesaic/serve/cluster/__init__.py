"""Several engines behind one front: replicas on Ray, routed by prefix and load."""
