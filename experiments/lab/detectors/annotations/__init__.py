"""Boxes as other tools write them (YOLO, COCO, Pascal VOC, CSV), found in a folder and read into one form."""
