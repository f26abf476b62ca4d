"""What runs the model: ``environment`` identifies the software that compiles its programs."""
