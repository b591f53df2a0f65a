"""``kvik stat``: what the engines of this user on this host are doing, asked over a UNIX socket.

Every engine listens on an abstract UNIX socket named ``kvik-stat-ENGINE_ID``, whichever transports it uses,
and a thread of its own answers there. No port is opened, and nothing is asked of the program around the
engine: it answers also while that program is busy or holds the GIL. An abstract name belongs to a network
namespace, so engines in another one (another container or pod) are not seen from here.
"""
