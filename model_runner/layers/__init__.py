"""The parts a decoder layer is made of."""
