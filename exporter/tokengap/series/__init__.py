"""NAME: pure, view to samples. The only place with series names."""
