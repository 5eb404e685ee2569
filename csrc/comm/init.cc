#include "comm/init.h"

#include "bootstrap/rendezvous.h"
#include "comm/settings.h"

namespace pycoll {

std::shared_ptr<LocalWorld> make_world(int num_ranks) {
  return make_local_world(num_ranks, Settings::read().to_bytes());
}

std::unique_ptr<Communicator> init_from_environment(double timeout_s,
                                                    Deadline::Interrupt interrupt) {
  const Deadline deadline = Deadline::after_s(timeout_s, interrupt);
  const LaunchEnv env = read_launch_env();
  if (env.num_ranks == 1) {
    return std::make_unique<Communicator>(make_local_transport(make_world(1), 0),
                                          deadline.timeout_s());
  }
  // The store has done its work once the ranks share memory: splits meet at sockets of their own.
  const Session session = join(env, deadline);
  const std::string settings = env.rank == 0 ? Settings::read().to_bytes() : std::string();
  return std::make_unique<Communicator>(
      make_shm_transport(session.name, env.rank, env.num_ranks, session.token, deadline, settings),
      deadline.timeout_s());
}

}  // namespace pycoll
