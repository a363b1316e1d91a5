"""What is to be run: settings of a cell, cells with their names, and the devices that there are."""
