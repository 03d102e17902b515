"""Small invented logs, one in each format, and how many rows of each are kept."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path

OWN = """job_id,submit_s,num_gpus,duration_s,user,vc,gpu_type,deadline_s,rewards
a,0,1,60,ann,v1,a100,120.5,120.5:10;240:2
b,5.5,4,7200.25,,,,,
"""
PHILLY_CSV = """timestamp,duration,num_gpus,gpu_time,cluster
2017-10-09 07:01:55,66.0,1,66.0,11cb48
2017-10-03 03:00:00,120,4,480,6214e9
2017-10-03 03:00:05,,1,,a
"""


def _attempt(start: str | None, end: str | None, *gpus: int) -> dict[str, object]:
    nodes = [{"ip": f"m{i}", "gpus": [f"gpu{g}" for g in range(count)]} for i, count in enumerate(gpus)]
    return {"start_time": start, "end_time": end, "detail": nodes}


def _philly(jobid: str, submitted: str | None, *attempts: object, status: str = "Pass") -> dict[str, object]:
    return {
        **{"status": status, "vc": "ee9e8c", "jobid": jobid, "user": "ce2f30"},
        **{"attempts": list(attempts), "submitted_time": submitted},
    }


T = "2017-10-07 01:{}:00"
PHILLY_JSON = json.dumps(
    [
        _philly("application_1_0001", T.format("00"), _attempt(T.format("05"), T.format("15"), 8, 4)),
        _philly(  # two attempts of 10 and 5 minutes with a pause: 900 s of service on the larger one's GPUs
            "application_1_0002",
            T.format("02"),
            _attempt(T.format("10"), T.format("20"), 1),
            _attempt(T.format("30"), T.format("35"), 2),
            status="Killed",
        ),
        _philly("application_1_0003", T.format("03"), status="Failed"),
        _philly("application_1_0004", T.format("04"), _attempt(T.format("10"), "None", 1)),
        _philly("application_1_0005", "", _attempt(T.format("10"), T.format("20"), 1)),
        _philly("application_1_0006", T.format("06"), _attempt("2017-10-07", T.format("20"), 1)),
        _philly("application_1_0007", T.format("06"), _attempt(None, T.format("20"), 1)),
        _philly("application_1_0008", T.format("06"), _attempt(T.format("10"), T.format("20"))),
        "not a job",
        _philly("application_1_0009", T.format("06"), {"detail": 7}),
    ],
    indent=1,
)
HELIOS = """job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue
101,u1,vcA,8,32,1,COMPLETED,2020-04-02 10:00:00,2020-04-02 10:00:30,2020-04-02 11:00:30,3600,30
102,u2,vcA,0,4,1,COMPLETED,2020-04-02 10:00:10,2020-04-02 10:00:10,2020-04-02 10:05:10,300,0
103,u1,vcB,1,4,1,CANCELLED,2020-04-02 09:59:00,None,None,0,0
104,u3,vcB,16,64,2,NODE_FAIL,2020-04-01 23:00:00,2020-04-02 00:00:00,2020-04-02 00:00:10,99,3600
105,u3,vcB,1,4,1,FAILED,2020-04-02 10:01:00,2020-04-02 10:01:00,2020-04-02 10:01:00,0,0
106,u3,vcB,one,4,1,FAILED,2020-04-02 10:01:00,2020-04-02 10:01:00,2020-04-02 10:02:00,60,0
107,u3,vcB,2,4,1,TIMEOUT,2020-04-02 10:01:00,2020-04-02 10:03:00,2020-04-02 10:02:00,60,0
108,u3,vcB,2,4,1,RUNNING,2020-04-02 10:01:00,2020-04-02 10:03:00,,,
"""
PAI_JOB = """j1,i1,u1,Terminated,100.0,900.0
j2,i2,u2,Failed,200.0,500.0
j3,i3,u3,Terminated,300.0,400.0
j4,i4,u4,Running,350.0,
j5,i5,u5,Terminated,0.0,400.0
j6,i6,u6,Terminated,360.0,400.0
j8,i8,u8,Terminated,500.0,600.0
"""
PAI_TASK = """j1,worker,4.0,Terminated,150.0,890.0,600.0,29.3,50.0,T4
j1,ps,2.0,Terminated,150.0,900.0,600.0,29.3,,CPU
j1,evaluator,1.0,Terminated,140.0,700.0,600.0,29.3,25.0,P100
j2,tensorflow,1.0,Failed,210.0,500.0,600.0,29.3,25.0,MISC
j8,worker,1.0,Running,510.0,,600.0,29.3,100.0,T4
j8,chief,1.0,Terminated,520.0,600.0,600.0,29.3,100.0,T4
j3,xComputeWorker,3.0,Terminated,310.0,400.0,600.0,29.3,,
j4,worker,1.0,Running,360.0,,600.0,29.3,100.0,V100
j5,worker,1.0,Terminated,310.0,400.0,600.0,29.3,100.0,V100
j7,worker,1.0,Terminated,310.0,400.0,600.0,29.3,100.0,V100
"""
PAI_HEADERS = {
    "pai_job_table.header": "job_name,inst_id,user,status,start_time,end_time\n",
    "pai_task_table.header": "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type\n",
}
SEREN = """job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue,gpu_time
dlc1,uA,1,8,64,SFT,COMPLETED,2023-03-01 00:01:00+08:00,2023-03-01 00:02:00+08:00,2023-03-01 01:02:00+08:00,1,1,1
dlc2,uB,64,512,4096,Pretrain,FAILED,2023-02-28 16:00:30+00:00,2023-03-01 00:00:30+08:00,2023-03-01 00:00:40+08:00,10,0,5120
dlc3,uB,1,0,16,Other,COMPLETED,2023-03-01 00:01:00+08:00,2023-03-01 00:02:00+08:00,2023-03-01 01:02:00+08:00,1,1,1
dlc4,uB,1,1,16,Eval,CANCELLED,2023-03-01 00:01:00+08:00,,,0,0,0
dlc5,uB,1,1,16,Eval,COMPLETED,2023-03-01 00:01:00,2023-03-01 00:02:00+08:00,2023-03-01 01:02:00+08:00,1,1,1
"""
KALOS = """job_id,user,node_num,gpu_num,cpu_num,mem_per_pod_GB,shared_mem_per_pod,type,state,submit_time,start_time,\
end_time,fail_time,stop_time,duration,queue,gpu_time
dj1,u1,2,16,128,800,400,Pretrain,COMPLETED,2023-05-17 12:00:00+00:00,2023-05-17 12:00:05+00:00,2023-05-17 13:00:05+00:00,\
,,3600,5,57600
dj2,u1,1,1,16,80,40,Debug,FAILED,2023-05-17 12:00:00+00:00,2023-05-17 12:00:05+00:00,2023-05-17 12:00:15+00:00,\
2023-05-17 12:00:15+00:00,,10,5,10
"""
CHRONUS = """job_id,user,num_gpu,submit_time,iterations,model_name,duration,interval,expect_time_list,expect_value_list,\
best_effort,job_type
0,vc_a,1,50,5049,vgg16,10,14,25,10,0,strict
1,vc_b,4,20,296,mobilenet_v2,20,8,30-40-55,10-8-5,0,soft
2,vc_a,2,30,3621,alexnet,30,17,30,10,1,best
3,vc_a,0,30,3621,alexnet,30,17,30,10,1,best
4,vc_a,1,30,3621,alexnet,30,17,30-x,10,0,strict
5,vc_a,1,30,3621,alexnet,30,17,30-40,10,0,soft
6,vc_a,1,30,3621,alexnet,30,17,0,10,0,strict
"""
POLLUX = """name,time,application,num_replicas,batch_size
cifar10-0,107,cifar10,6,2048
ncf-1,20.25,ncf,1,32768
gpt-2,30,gpt,1,32
bert-3,40,bert,12,384
bert-4,41,bert,12,8
"""
SLURM = """JobID|JobName|User|Partition|Submit|Start|End|Elapsed|State|AllocTRES|ReqTRES|NNodes|Timelimit
1001|train|ann|gpu|2024-01-02T08:00:00|2024-01-02T08:10:00|2024-01-03T09:10:05|1-01:00:05|COMPLETED|\
billing=8,cpu=8,gres/gpu:a100=4,gres/gpu=4,mem=64G,node=1|cpu=8,gres/gpu=4|1|2-00:00:00
1001.batch|batch|||2024-01-02T08:10:00|2024-01-02T08:10:00|2024-01-03T09:10:05|1-01:00:05|COMPLETED|cpu=8,gres/gpu=4||1|
1001.0|python|||2024-01-02T08:10:00|2024-01-02T08:10:00|2024-01-03T09:10:05|1-01:00:05|COMPLETED|cpu=8,gres/gpu=4||1|
1002_4|sweep|bob|gpu|2024-01-02T07:00:00|2024-01-02T07:00:30|2024-01-02T07:30:30|00:30:00|CANCELLED by 1001|\
cpu=2,gres/gpu:v100=1,gres/gpu:a100=2|cpu=2|1|UNLIMITED
1002_[5-8]|sweep|bob|gpu|2024-01-02T07:00:00|Unknown|Unknown|00:00:00|PENDING||cpu=2,gres/gpu=1|1|01:00:00
1003|cpu|bob|cpu|2024-01-02T07:00:00|2024-01-02T07:00:30|2024-01-02T07:30:30|00:30:00|COMPLETED|cpu=2|cpu=2|1|01:00:00
1004|long|cyd|gpu|2024-01-02T06:00:00|2024-01-02T06:00:10|2024-01-02T06:30:10|00:30:00|REQUEUED|gres/gpu=8|gres/gpu=8|2|01:00:00
1004|long|cyd|gpu|2024-01-02T06:30:10|2024-01-02T06:40:10|2024-01-02T06:50:10|10:00|COMPLETED|gres/gpu=8|gres/gpu=8|2|01:00:00
1005|run|cyd|gpu|2024-01-02T06:00:00|2024-01-02T06:00:10|Unknown|5-00:00:00|RUNNING|gres/gpu=8|gres/gpu=8|2|Partition_Limit
1006|bad|cyd|gpu|2024-01-02T06:00:00|2024-01-02T06:00:10|Unknown|soon|FAILED|gres/gpu=8|gres/gpu=8|2|x
1007|a|b|cyd|gpu|2024-01-02T06:00:00|2024-01-02T06:00:10|Unknown|00:10:00|FAILED|gres/gpu=8|gres/gpu=8|2|x
1008+0|het|cyd|gpu|2024-01-02T09:00:00|2024-01-02T09:00:10|Unknown|00:10:00|COMPLETED|gres/gpu=8||2|
1008+1|het|cyd|gpu|2024-01-02T09:00:00|2024-01-02T09:00:10|Unknown|00:10:00|COMPLETED|gres/gpu=1||2|
1001|train|ann|gpu|2024-01-02T08:00:00|2024-01-02T08:10:00|2024-01-03T09:10:05|1-01:00:05|COMPLETED|\
billing=8,cpu=8,gres/gpu:a100=4,gres/gpu=4,mem=64G,node=1|cpu=8,gres/gpu=4|1|2-00:00:00
"""

LOGS: Mapping[str, tuple[str, str]] = {
    "icefrog-csv": ("jobs.csv", OWN),
    "philly-csv": ("philly.csv", PHILLY_CSV),
    "philly-json": ("cluster_job_log", PHILLY_JSON),
    "helios": ("cluster_log.csv", HELIOS),
    "pai": ("pai_task_table.csv", PAI_TASK),
    "acme": ("trace_seren.csv", SEREN),
    "chronus": ("chronus.csv", CHRONUS),
    "pollux": ("workload.csv", POLLUX),
    "slurm": ("sacct.txt", SLURM),
}
"""Format: file name and content (PAI: its task table alone)."""


def write_log(folder: Path, format: str, *, packed: bool = False) -> Path:
    """Write one of the logs."""
    name, text = LOGS[format]
    path = folder / (f"{name}.gz" if packed else name)
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if packed else text.encode())
    return path


def write_pai(folder: Path) -> Path:
    """PAI's folder: two tables, their headers apart."""
    for name, text in {"pai_job_table.csv": PAI_JOB, "pai_task_table.csv": PAI_TASK, **PAI_HEADERS}.items():
        (folder / name).write_text(text)
    return folder
