"""The tests are a package of their own name, whatever other package ships a folder of this name."""
