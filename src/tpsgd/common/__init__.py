"""Files, names, sizes, errors and plug-ins: what every part of the library may use."""
