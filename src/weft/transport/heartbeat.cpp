// Heartbeats over connected sockets, by a thread that needs nothing of Python's: one byte each interval, both ways.

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <mutex>
#include <thread>
#include <vector>

#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0 // Python ignores SIGPIPE
#endif

namespace {

constexpr unsigned char NATIVE = 1; // what a beat says of its sender; heartbeat.py has the other

struct Link {
    int fd = -1; // -1: this place is free
    double silent = 0;
    int sender = 0;
    bool ended = false;
};

struct Heart {
    explicit Heart(double interval) : interval(interval) {}
    const double interval;
    std::mutex lock;
    std::vector<Link> links;
};

bool fatal(ssize_t result) {
    return result < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR;
}

void listen_and_beat(Link &link, double passed) {
    unsigned char heard[4096];
    const ssize_t got = recv(link.fd, heard, sizeof heard, MSG_DONTWAIT);
    if (got > 0) {
        link.silent = 0;
        link.sender = heard[got - 1];
    } else {
        link.silent += passed;
        link.ended = link.ended || got == 0 || fatal(got);
    }
    const unsigned char beat = NATIVE;
    link.ended = link.ended || fatal(send(link.fd, &beat, 1, MSG_DONTWAIT | MSG_NOSIGNAL));
}

// Silence is counted while this process itself runs: after a stop of its own nobody is silent.
void run(Heart *heart) {
    using clock = std::chrono::steady_clock;
    auto before = clock::now();
    while (true) {
        std::this_thread::sleep_for(std::chrono::duration<double>(heart->interval));
        const auto now = clock::now();
        const double passed = std::chrono::duration<double>(now - before).count();
        before = now;
        const std::lock_guard<std::mutex> held(heart->lock);
        for (Link &link : heart->links) {
            if (link.fd >= 0 && !link.ended) listen_and_beat(link, std::min(passed, 2 * heart->interval));
        }
    }
}

} // namespace

extern "C" {

// Never ends, and is never freed: it lasts as long as the process.
void *heart_start(double interval_s) {
    auto *heart = new Heart(interval_s);
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); // signals are for Python's own threads
    std::thread(run, heart).detach();
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
    return heart;
}

// Takes a connected socket over, and sends the first beat. Returns its place.
int heart_add(void *of, int fd) {
    auto *heart = static_cast<Heart *>(of);
    const std::lock_guard<std::mutex> held(heart->lock);
    size_t place = 0;
    while (place < heart->links.size() && heart->links[place].fd >= 0) ++place;
    if (place == heart->links.size()) heart->links.emplace_back();
    heart->links[place] = Link{};
    heart->links[place].fd = fd;
    listen_and_beat(heart->links[place], 0);
    return static_cast<int>(place);
}

// Seconds since the last beat; -1 where the connection has ended.
double heart_silent(void *of, int place) {
    auto *heart = static_cast<Heart *>(of);
    const std::lock_guard<std::mutex> held(heart->lock);
    const Link &link = heart->links[place];
    return link.ended ? -1 : link.silent;
}

// What the last beat said of its sender; 0: none has come.
int heart_sender(void *of, int place) {
    auto *heart = static_cast<Heart *>(of);
    const std::lock_guard<std::mutex> held(heart->lock);
    return heart->links[place].sender;
}

void heart_drop(void *of, int place) {
    auto *heart = static_cast<Heart *>(of);
    const std::lock_guard<std::mutex> held(heart->lock);
    close(heart->links[place].fd);
    heart->links[place] = Link{};
}
}
