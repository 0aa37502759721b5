// The delay line of emulated links: packets go between pairs of TAP devices, and one way they are held and some are lost.
//
// A packet is stamped when it is read and written on when its time has come, never before the one in front of it. All
// devices have a virtio header in front of each packet (IFF_VNET_HDR), which goes on with it: so what TCP hands down as
// one large packet crosses as one.

#ifdef __linux__

#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

namespace {

constexpr int kPacketsPerTurn = 64;     // of one device, before the others have their turn
constexpr size_t kLargest = 1u << 17;   // of a packet with its headers; the kernel makes none above 64 KiB and a few
constexpr int64_t kSecond = 1000000000;

struct Packet {
  int64_t due;
  size_t size;
  std::unique_ptr<char[]> data;
};

struct Random {  // splitmix64
  uint64_t state;
  double uniform() {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
  }
};

struct Line {  // one direction of one link
  int from, to;
  int64_t delay, jitter;
  double loss;
  Random random;  // of its own: what one host sends does not change what another one loses
  std::deque<Packet> held;
  int64_t held_bytes = 0;
  int64_t last_due = 0;
};

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * kSecond + t.tv_nsec;
}

// Whether a device is gone for good; any other error is one packet's: an interface that is down refuses it.
bool gone(int error) { return error == EBADFD || error == EBADF || error == ENODEV; }

int write_on(int to, const char* data, size_t size) {
  return write(to, data, size) < 0 && gone(errno) ? errno : 0;
}

int take(Line& line, char* buffer, int64_t capacity) {
  for (int i = 0; i < kPacketsPerTurn; ++i) {
    const ssize_t size = read(line.from, buffer, kLargest);
    if (size < 0) return gone(errno) ? errno : 0;
    if (line.loss > 0 && line.random.uniform() < line.loss) continue;
    if (line.delay == 0 && line.jitter == 0) {
      if (const int error = write_on(line.to, buffer, size)) return error;
      continue;
    }
    if (line.held_bytes + size > capacity) continue;  // a full buffer drops what comes last
    int64_t due = now() + line.delay;
    if (line.jitter > 0) due += static_cast<int64_t>((2 * line.random.uniform() - 1) * static_cast<double>(line.jitter));
    line.last_due = due = due > line.last_due ? due : line.last_due;
    Packet packet{due, static_cast<size_t>(size), std::unique_ptr<char[]>(new char[size])};
    memcpy(packet.data.get(), buffer, size);
    line.held.push_back(std::move(packet));
    line.held_bytes += size;
  }
  return 0;
}

int release(Line& line) {
  while (!line.held.empty() && line.held.front().due <= now()) {
    const Packet& packet = line.held.front();
    if (const int error = write_on(line.to, packet.data.get(), packet.size)) return error;
    line.held_bytes -= static_cast<int64_t>(packet.size);
    line.held.pop_front();
  }
  return 0;
}

}  // namespace

extern "C" {

// Carry packets between hosts[i] and ports[i] until `stop` can be read or is closed: 0, or the number of the error that
// ended it. Only what hosts send waits and gets lost, so both happen once on a way from one host to another.
int tw_relay(int count, const int* hosts, const int* ports, int64_t delay_ns, int64_t jitter_ns, double loss,
             uint64_t seed, int64_t capacity, int stop) {
  std::vector<Line> lines(2 * count);
  const int poll = epoll_create1(EPOLL_CLOEXEC), timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
  if (poll < 0 || timer < 0) return errno;
  const auto watch = [poll](int fd, uint32_t key) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u32 = key;
    return epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event) < 0 ? errno : 0;
  };
  const uint32_t num_lines = static_cast<uint32_t>(2 * count), timer_key = num_lines, stop_key = num_lines + 1;
  int error = watch(timer, timer_key);
  if (!error) error = watch(stop, stop_key);
  for (int i = 0; i < count && !error; ++i) {
    lines[2 * i].from = lines[2 * i + 1].to = hosts[i];
    lines[2 * i].to = lines[2 * i + 1].from = ports[i];
    lines[2 * i].delay = delay_ns, lines[2 * i].jitter = jitter_ns, lines[2 * i].loss = loss;
    lines[2 * i + 1].delay = lines[2 * i + 1].jitter = 0, lines[2 * i + 1].loss = 0;
    lines[2 * i].random.state = seed + (static_cast<uint64_t>(i) << 32);
    error = watch(hosts[i], 2 * i);
    if (!error) error = watch(ports[i], 2 * i + 1);
  }
  std::unique_ptr<char[]> buffer(new char[kLargest]);
  int64_t armed = 0;
  bool going = true;
  while (going && !error) {
    epoll_event events[64];
    const int ready = epoll_wait(poll, events, 64, -1);
    if (ready < 0 && errno != EINTR) error = errno;
    for (int i = 0; i < ready && !error; ++i) {
      const uint32_t key = events[i].data.u32;
      if (key == stop_key) {
        going = false;
      } else if (key == timer_key) {
        uint64_t expired;
        if (read(timer, &expired, sizeof expired) > 0) armed = 0;
      } else {
        error = take(lines[key], buffer.get(), capacity);
      }
    }
    int64_t next = 0;
    for (Line& line : lines) {
      if (!error) error = release(line);
      if (!line.held.empty() && (next == 0 || line.held.front().due < next)) next = line.held.front().due;
    }
    if (next != 0 && next != armed) {
      itimerspec when{};
      when.it_value.tv_sec = next / kSecond, when.it_value.tv_nsec = next % kSecond;
      if (timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, nullptr) < 0) error = errno;
      armed = next;
    }
  }
  close(poll);
  close(timer);
  return error;
}

}  // extern "C"

#endif  // __linux__
