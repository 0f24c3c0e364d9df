package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/better-compute/join-operator/hack/controlplane"
)

const (
	trustDomain     = "dev.join.test"
	systemNamespace = "join-system"
	keysNamespace   = "join-keys"
	trustNamespace  = "join-trust"
)

// ports are the loopback ports of a system: chosen once, and kept.
type ports struct {
	APIServer, Etcd, EtcdPeer, ControllerManager int
	Postgres                                     int
	Manager, ManagerMetrics                      int
	JoinService, JoinServiceMetrics              [2]int
	Gateway, GatewayMetrics                      int
}

// system is one dev system: its folder and its ports.
type system struct {
	root, dir string
	ports     ports
	begun     time.Time
}

func newSystem(dir string) (*system, error) {
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		return nil, err
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return nil, err
	}
	s := &system{root: root, dir: dir, begun: time.Now()}
	for _, sub := range []string{"run", "log"} {
		if err := os.MkdirAll(s.path(sub), 0o755); err != nil {
			return nil, err
		}
	}
	return s, s.choosePorts()
}

func (s *system) path(elem ...string) string {
	return filepath.Join(append([]string{s.dir}, elem...)...)
}

func (s *system) choosePorts() error {
	file := s.path("ports.json")
	b, err := os.ReadFile(file)
	if err == nil {
		return json.Unmarshal(b, &s.ports)
	}
	if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	free, err := controlplane.FreePorts(13)
	if err != nil {
		return err
	}
	s.ports = ports{
		APIServer: free[0], Etcd: free[1], EtcdPeer: free[2], ControllerManager: free[3],
		Postgres: free[4], Manager: free[5], ManagerMetrics: free[6],
		JoinService: [2]int{free[7], free[8]}, JoinServiceMetrics: [2]int{free[9], free[10]},
		Gateway: free[11], GatewayMetrics: free[12],
	}
	if b, err = json.MarshalIndent(s.ports, "", "  "); err != nil {
		return err
	}
	return writeFile(file, b, 0o644)
}

// layout is the control plane's.
func (s *system) layout() controlplane.Layout {
	return controlplane.Layout{
		Dir: s.dir, APIPort: s.ports.APIServer, EtcdPort: s.ports.Etcd, EtcdPeerPort: s.ports.EtcdPeer,
		ControllerManagerPort: s.ports.ControllerManager, Durable: true,
	}
}

// lock keeps two launchers from working on one system at a time. The lock goes
// with the process that holds it.
func (s *system) lock() (func(), error) {
	f, err := os.OpenFile(s.path("lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		f.Close()
		return nil, err
	}
	return func() { f.Close() }, nil
}

// say prints a line of progress, with the time since the start.
func (s *system) say(format string, args ...any) {
	fmt.Printf("%6.1fs  %s\n", time.Since(s.begun).Seconds(), fmt.Sprintf(format, args...))
}

// writeFile writes a file whole or not at all.
func writeFile(path string, b []byte, mode os.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".new-")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(b)
	if err := errors.Join(err, f.Chmod(mode), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
