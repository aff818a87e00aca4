"""Tunnels: a public address for a peer that nobody can dial otherwise."""

from manyhands.tunnels.keeper import Tunnel, TunnelKeeper
from manyhands.tunnels.ngrok import NgrokTunnel

__all__ = ["NgrokTunnel", "Tunnel", "TunnelKeeper"]
