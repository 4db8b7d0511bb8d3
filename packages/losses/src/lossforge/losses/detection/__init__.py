"""What detectors do beside their losses: match predictions to boxes, and assign boxes to the anchors that predict them."""
