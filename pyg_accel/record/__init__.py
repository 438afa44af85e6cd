"""Programs of layers: what a call computes, recorded once, run without the layer's code."""
