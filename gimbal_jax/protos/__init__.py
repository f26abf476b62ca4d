"""Generated from control.proto by `make protos`; not edited by hand."""
