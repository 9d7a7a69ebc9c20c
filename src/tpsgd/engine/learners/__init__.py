"""What learns: a block by an optimizer or by least squares, a whole net by backprop."""
