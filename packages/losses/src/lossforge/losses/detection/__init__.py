"""What detectors do beside their losses of pairs: match predictions to boxes, assign boxes to anchors, and weigh rare classes."""
