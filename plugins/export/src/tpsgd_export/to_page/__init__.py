"""A page that learns: an exported net as WebAssembly, with samples, in one HTML file."""
