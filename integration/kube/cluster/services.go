package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	// How long a program may take to end after SIGTERM before it is killed.
	stopTime = 15 * time.Second
	// How long a program may take to be ready, on two busy cores.
	readyTime = 120 * time.Second
	readyStep = 50 * time.Millisecond
)

// service is a program that a supervisor keeps: started, stopped, paused and killed by name.
type service struct {
	name string
	argv []string
	env  []string
	// Namespaces that the program gets for itself.
	namespaces uintptr
	// log receives what the program writes.
	log string
	// started, if any, runs once after each start; the program waits for the byte that it gets by its standard input after
	// it.
	started func(pid int) error
	// ready tells why the program is not ready yet.
	ready func() error

	pid    int
	paused bool
	exited chan syscall.WaitStatus
	last   string
}

// supervisor is the first process of a PID namespace: it starts programs, reaps everything, and serves a control socket.
type supervisor struct {
	mutex    sync.Mutex
	services []*service
	children map[int]chan syscall.WaitStatus
	// command is the user's, if it runs.
	command atomic.Int64
}

// request is one line of JSON that a control socket takes; reply is its answer.
type request struct {
	Verb    string
	Service string
	Value   string
}

type reply struct {
	Error    string
	Services []status
}

// status of a service as the control socket tells it.
type status struct {
	Name  string
	State string
	Pid   int
}

func newSupervisor() *supervisor {
	s := &supervisor{children: map[int]chan syscall.WaitStatus{}}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGCHLD)
	go func() {
		for range signals {
			s.reap()
		}
	}()
	return s
}

func (s *supervisor) reap() {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		// A child is registered under this lock before it can be looked for.
		s.mutex.Lock()
		if exited, ours := s.children[pid]; ours {
			exited <- status
			delete(s.children, pid)
		}
		s.mutex.Unlock()
	}
}

// spawn starts a program; its end is told once by the channel.
func (s *supervisor) spawn(argv []string, attributes *os.ProcAttr) (int, chan syscall.WaitStatus, error) {
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return 0, nil, err
	}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	process, err := os.StartProcess(path, argv, attributes)
	if err != nil {
		return 0, nil, fmt.Errorf("start %s: %w", argv[0], err)
	}
	pid := process.Pid
	// reap waits for it, by its number.
	_ = process.Release()
	exited := make(chan syscall.WaitStatus, 1)
	s.children[pid] = exited
	return pid, exited, nil
}

// run runs a program to its end and returns what it wrote as an error if it failed.
func (s *supervisor) run(argv ...string) error {
	output, err := os.CreateTemp("", "union-kube")
	if err != nil {
		return err
	}
	defer func() {
		_ = output.Close()
		_ = os.Remove(output.Name())
	}()
	_, exited, err := s.spawn(argv, &os.ProcAttr{Env: os.Environ(), Files: []*os.File{nil, output, output}})
	if err != nil {
		return err
	}
	if status := <-exited; status != 0 {
		text, _ := os.ReadFile(output.Name())
		return fmt.Errorf("%s: %s: %s", strings.Join(argv, " "), describe(status), bytes.TrimSpace(text))
	}
	return nil
}

func (s *supervisor) find(name string) (*service, error) {
	var names []string
	for _, candidate := range s.services {
		if candidate.name == name {
			return candidate, nil
		}
		names = append(names, candidate.name)
	}
	return nil, fmt.Errorf("there is no %q here, only %s", name, strings.Join(names, ", "))
}

// running tells whether a service's program runs, and notes its end if it does not.
func (v *service) running() bool {
	if v.pid == 0 {
		return false
	}
	select {
	case status := <-v.exited:
		v.ended(status)
		return false
	default:
		return true
	}
}

func (v *service) ended(status syscall.WaitStatus) {
	v.pid, v.paused, v.last = 0, false, describe(status)
}

// start starts a service and waits until it is ready.
func (s *supervisor) start(v *service) error {
	if v.running() {
		return fmt.Errorf("%s already runs", v.name)
	}
	log, err := os.OpenFile(v.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	wait, release, err := os.Pipe()
	if err != nil {
		return err
	}
	defer wait.Close()
	defer release.Close()
	v.pid, v.exited, err = s.spawn(v.argv, &os.ProcAttr{
		Env:   append(os.Environ(), v.env...),
		Files: []*os.File{wait, log, log},
		Sys:   &syscall.SysProcAttr{Setsid: true, Cloneflags: v.namespaces},
	})
	if err != nil {
		return err
	}
	if v.started != nil {
		if err := v.started(v.pid); err != nil {
			_ = syscall.Kill(v.pid, syscall.SIGKILL)
			return fmt.Errorf("%s: %w", v.name, err)
		}
		if _, err := release.Write([]byte{0}); err != nil {
			return fmt.Errorf("%s ended at once: %w\n%s", v.name, err, tail(v.log))
		}
	}
	return s.await(v)
}

func (s *supervisor) await(v *service) error {
	var why error
	for begun := time.Now(); time.Since(begun) < readyTime; time.Sleep(readyStep) {
		if !v.running() {
			return fmt.Errorf("%s ended before it was ready: %s\n%s", v.name, v.last, tail(v.log))
		}
		if v.ready == nil {
			return nil
		}
		if why = v.ready(); why == nil {
			return nil
		}
	}
	return fmt.Errorf("%s is not ready after %s: %w\n%s", v.name, readyTime, why, tail(v.log))
}

// stop ends a service's program: with SIGTERM and, if that is not enough, or if it is paused, with SIGKILL.
func (s *supervisor) stop(v *service, first syscall.Signal) error {
	if !v.running() {
		return fmt.Errorf("%s does not run (%s)", v.name, v.last)
	}
	if v.paused {
		first = syscall.SIGKILL
	}
	for _, sig := range []syscall.Signal{first, syscall.SIGKILL} {
		if err := syscall.Kill(v.pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
			return err
		}
		select {
		case status := <-v.exited:
			v.ended(status)
			return nil
		case <-time.After(stopTime):
		}
	}
	return fmt.Errorf("%s did not end within %s of SIGKILL", v.name, stopTime)
}

func (s *supervisor) freeze(v *service, pause bool) error {
	if !v.running() {
		return fmt.Errorf("%s does not run (%s)", v.name, v.last)
	}
	sig := syscall.SIGCONT
	if pause {
		sig = syscall.SIGSTOP
	}
	v.paused = pause
	return syscall.Kill(v.pid, sig)
}

// serve answers one request at a time on a control socket. Verbs that the supervisor does not know are given to extra.
func (s *supervisor) serve(path string, extra func(request) error) error {
	_ = os.Remove(path)
	listener, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	go func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			var asked request
			if err := json.NewDecoder(connection).Decode(&asked); err == nil {
				_ = json.NewEncoder(connection).Encode(s.answer(asked, extra))
			}
			_ = connection.Close()
		}
	}()
	return nil
}

func (s *supervisor) answer(asked request, extra func(request) error) reply {
	if asked.Verb == "status" {
		var all []status
		for _, v := range s.services {
			state := "stopped"
			switch running := v.running(); {
			case running && v.paused:
				state = "paused"
			case running:
				state = "running"
			case v.last != "":
				state = "stopped: " + v.last
			}
			all = append(all, status{v.name, state, v.pid})
		}
		return reply{Services: all}
	}
	if err := s.act(asked, extra); err != nil {
		return reply{Error: err.Error()}
	}
	return reply{}
}

func (s *supervisor) act(asked request, extra func(request) error) error {
	switch asked.Verb {
	case "stop", "kill", "start", "restart", "pause", "resume":
	default:
		return extra(asked)
	}
	v, err := s.find(asked.Service)
	if err != nil {
		return err
	}
	switch asked.Verb {
	case "stop":
		return s.stop(v, syscall.SIGTERM)
	case "kill":
		return s.stop(v, syscall.SIGKILL)
	case "restart":
		if err := s.stop(v, syscall.SIGTERM); err != nil {
			return err
		}
		return s.start(v)
	case "pause":
		return s.freeze(v, true)
	case "resume":
		return s.freeze(v, false)
	default:
		return s.start(v)
	}
}

// ask sends one request to a control socket.
func ask(socket string, asked request) (reply, error) {
	connection, err := net.DialTimeout("unix", socket, readyTime)
	if err != nil {
		return reply{}, err
	}
	defer connection.Close()
	if err := connection.SetDeadline(time.Now().Add(readyTime + 4*stopTime)); err != nil {
		return reply{}, err
	}
	if err := json.NewEncoder(connection).Encode(asked); err != nil {
		return reply{}, err
	}
	var answer reply
	if err := json.NewDecoder(connection).Decode(&answer); err != nil {
		return reply{}, fmt.Errorf("%s gave no answer: %w", socket, err)
	}
	if answer.Error != "" {
		return reply{}, errors.New(answer.Error)
	}
	return answer, nil
}

func describe(status syscall.WaitStatus) string {
	if status.Signaled() {
		return "ended by " + status.Signal().String()
	}
	return fmt.Sprintf("ended with status %d", status.ExitStatus())
}

// tail returns the last lines of a log.
func tail(path string) string {
	const lines = 25
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimSpace(string(text)), "\n")
	return filepath.Base(path) + ":\n  " + strings.Join(all[max(0, len(all)-lines):], "\n  ")
}
