"""The data package: a descriptor of result tables by which any Frictionless tool can read and check them."""
