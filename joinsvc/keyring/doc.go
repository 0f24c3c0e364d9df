// Package keyring holds a replica's own keys: those that sign answers, those that
// machines seal to, and those that seal what goes through a machine's hands
// (challenges). They are Secrets of the keys' namespace, made and rotated by the
// keys job; a replica takes each change live.
package keyring
