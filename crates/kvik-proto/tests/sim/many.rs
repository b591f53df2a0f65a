//! Many engines at once.
