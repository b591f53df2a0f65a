"""kvik between two hosts: two network namespaces with their own addresses, joined by a virtual cable."""
