"""What the physics of a handover says: bytes of KV, floors under times, models of transfers, crossovers."""
