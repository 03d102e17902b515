"""The Pollux world: the published simulation of Pollux (OSDI'21), from its measurements, as a world of our simulator."""
