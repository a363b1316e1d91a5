"""What devices and links do in a second, as data."""
