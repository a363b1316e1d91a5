"""The report: tables, figures, timelines and their provenance in one HTML file that needs no network.

It reads what the workflow left, CSV and SVG, and never PyTorch. The same files give the same bytes.
"""
